"""What a run leaves behind: records while it runs, result, tables and comparisons at its end."""
