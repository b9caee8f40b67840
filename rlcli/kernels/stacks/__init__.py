"""Frame stacks of which only the newest frame is stored: which rows follow by a shift, and where older frames lie."""
