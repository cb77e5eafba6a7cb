"""Public functions as rows, and what makes their faces from them."""
