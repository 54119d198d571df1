"""The database: its tables, its one writer, and reads that end in time."""
