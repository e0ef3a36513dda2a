// options.cpp as C++20, which can name members.
#include "options.cpp"
