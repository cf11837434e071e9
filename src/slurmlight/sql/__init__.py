"""Safe execution of SQL, schema text and the comparison of results."""
