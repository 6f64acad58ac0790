"""One frozen dataclass per command; each field is a command-line flag (see `options`)."""
