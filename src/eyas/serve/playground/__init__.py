"""The playground at `/`: one page with a chat, the draft trees, a race and gauges."""
