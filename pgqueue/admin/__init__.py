"""What people see and do by hand."""
