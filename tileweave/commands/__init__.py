"""What each command of `tileweave` does; `tileweave/cli.py` holds their options."""
