"""Tasks and databases: the generated toy set and the import of Spider."""
