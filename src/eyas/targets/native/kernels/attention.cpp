// Attention, compiled in parallel with the rest.
#include "attention.h"

namespace eyas {

template class Queries<float>;
template class Queries<uint16_t>;
template class Queries<int8_t>;

}  // namespace eyas
