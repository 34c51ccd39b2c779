"""When trials end early: one rule in a module, each a pure state that is told and asked."""
