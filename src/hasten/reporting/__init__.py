"""What people see: the report's page and the answers in the terminal. Reads results, never a live training."""
