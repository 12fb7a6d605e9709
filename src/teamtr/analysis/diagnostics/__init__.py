"""What can be seen of a team besides its reward."""
