"""The rules that end trials early: pure states that hear and decide."""
