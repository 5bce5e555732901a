"""What several verbs share: options, engines built from options, display, errors."""
