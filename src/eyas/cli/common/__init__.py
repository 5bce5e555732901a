"""What verbs share: parsing and errors, options and their aliases, engines from options, display."""
