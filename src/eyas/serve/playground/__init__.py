"""The playground at `/`: one page with a chat, draft trees, a race against plain decoding, and gauges."""
