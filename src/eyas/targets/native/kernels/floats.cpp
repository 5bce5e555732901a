// Register tiles of float weights, which take long to compile: in parallel with the rest.
#include "linear.h"

namespace eyas {

Tile tile_of(int64_t kind, bool paired, int64_t tokens, int64_t panels) {
    if (kind == FLOAT32) return tile_of<FLOAT32, false>(tokens, panels);
    return paired ? tile_of<BFLOAT16, PAIRS>(tokens, panels) : tile_of<BFLOAT16, false>(tokens, panels);
}

}  // namespace eyas
