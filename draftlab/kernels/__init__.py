"""One file a kernel; the eager reference defines it and runs wherever no kernel applies."""
