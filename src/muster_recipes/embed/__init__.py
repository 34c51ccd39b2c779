"""Recipe ``embed``: a vector for each text, from an encoder or from a function of the user."""
