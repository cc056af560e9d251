"""The base of every view: streams, cell widths, number formats, tables, progress."""
