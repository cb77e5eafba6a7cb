"""Shared helpers: arguments, keywords, warnings, logging, the runtime."""
