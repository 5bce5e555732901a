"""HTTP below the routes: request bodies, and responses as JSON documents or event streams."""
