"""Recipe ``har``: human activity recognition from windows of inertial signals."""
