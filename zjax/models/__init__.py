"""Models that zjax trains from configs. The library itself never imports them."""
