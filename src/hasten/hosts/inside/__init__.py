"""What runs inside the user's script: one file for each seam between its training loop and hasten."""
