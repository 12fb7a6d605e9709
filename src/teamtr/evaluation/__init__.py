"""How good a team is: metrics with intervals, evaluation by play, exact success where a task has a closed form."""
