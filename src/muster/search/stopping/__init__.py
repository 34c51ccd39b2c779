"""The rules that end trials early, one in each module: pure states that hear and decide."""
