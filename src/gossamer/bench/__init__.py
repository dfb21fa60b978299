"""The tool: the command line, and what it runs and shows. The library imports nothing of it."""
