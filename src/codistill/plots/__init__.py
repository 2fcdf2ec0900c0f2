"""All pictures, as functions of plain data, in one style."""
