"""What every part stands on: arguments, keywords, warnings, the log, the runtime."""
