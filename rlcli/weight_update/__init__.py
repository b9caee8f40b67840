"""How weights get from what is trained to the workers that act: schemes, senders, receivers, transports."""
