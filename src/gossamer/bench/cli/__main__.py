from gossamer.bench.cli import entry

entry()
