from gossamer.cli import entry

entry()
