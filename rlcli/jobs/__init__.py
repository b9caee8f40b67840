"""Jobs: a training run, a collecting run, a trained policy. Each is given what it is made of."""
