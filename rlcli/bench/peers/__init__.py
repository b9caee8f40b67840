"""Other frameworks, measured in their own documented way where they are installed. The only place that imports them."""
