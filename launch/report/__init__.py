"""What is told about plans and runs."""
