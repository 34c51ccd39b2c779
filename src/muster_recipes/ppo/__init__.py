"""Recurrent PPO on any Gymnasium environment; see docs/ppo.md."""
