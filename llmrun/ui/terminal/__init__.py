"""What every view stands on: output, widths, formats, tables, progress."""
