// Attention, compiled beside the rest.
#include "attention.h"

namespace eyas {

template class Queries<float>;
template class Queries<uint16_t>;

}  // namespace eyas
