"""The page to talk to that the server answers at `/`: its files, its routes, and the saved chats behind them."""
