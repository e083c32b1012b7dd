"""What a job is: values and rules, without I/O."""
