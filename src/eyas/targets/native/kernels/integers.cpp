// Register tiles of packed weights, which take long to compile: in parallel with the rest.
#include "linear.h"

namespace eyas {

Tile packed_tile_of(const Linear& linear, bool unpacked, int64_t tokens, int64_t panels) {
    return with_kind(linear.kind, [&](auto kind) -> Tile {
        if (linear.microkernels == AS_FLOATS) return float_tile<kind.value>;
        if constexpr (code_bits(kind.value) < 8)
            if (unpacked) return integer_tile_of<kind.value | IN_BYTES>(tokens, panels);
        return integer_tile_of<kind.value>(tokens, panels);
    });
}

void unpack_panel(const Linear& linear, int64_t panel, char* unpacked) {
    const char* packed = linear.weight + panel * panel_bytes(linear);
    with_kind(linear.kind, [&](auto kind) { unpack_panel<kind.value>(packed, linear.in, unpacked); });
}

void narrow_panel(const Linear& linear, int64_t panel, char* narrow) {
    const char* packed = linear.weight + panel * panel_bytes(linear);
    with_kind(linear.kind, [&](auto kind) { narrow_panel<kind.value>(packed, linear.in, narrow); });
}

}  // namespace eyas
