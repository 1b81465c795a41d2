"""Tests of the engine on the fake runner."""
