// The headers that most tests include, in addition to libraries.in.h, which precedes them.
#ifndef __clang__

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif
