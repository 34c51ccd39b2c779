"""Recurrent PPO on a market of options; see docs/clstm-ppo.md."""
