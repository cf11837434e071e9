"""What an episode earned."""
