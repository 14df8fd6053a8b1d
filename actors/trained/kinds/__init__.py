"""Kinds of trained drafters, a module each.

A new kind takes a module that loads and attaches it, an entry in `actors.trained.drafter_model`, and a way to tell it
apart in `recognition`.
"""
