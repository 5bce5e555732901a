// Register tiles of packed weights, which take long to compile: in parallel with the rest.
#include "linear.h"

namespace eyas {

Tile packed_tile_of(const Linear& linear, int64_t tokens, int64_t panels) {
    return with_kind(linear.kind, [&](auto kind) -> Tile {
        return linear.microkernels == AS_FLOATS ? float_tile<kind.value> : integer_tile_of<kind.value>(tokens, panels);
    });
}

}  // namespace eyas
