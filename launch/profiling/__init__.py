"""``arachne profile``: what is measured on each rank, and how it becomes the files of a profile."""
