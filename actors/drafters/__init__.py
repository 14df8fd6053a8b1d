"""Drafters: the actors that propose tokens. A new one goes here, as a subclass of `drafter.Drafter`."""
