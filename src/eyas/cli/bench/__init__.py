"""The verbs that measure: `eyas bench ...`."""
