// Ops as data: a function and its arguments in words, so that a step's calls can be written down once and made again by
// one call from Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "team.h"

namespace octavo {

// One argument.
union Word {
  void* address;
  int64_t integer;
  float real;
};
static_assert(sizeof(Word) == 8);

template <class T>
T argument(const Word& word) {
  if constexpr (std::is_pointer_v<T>)
    return static_cast<T>(word.address);
  else if constexpr (std::is_same_v<T, float>)
    return word.real;
  else
    return static_cast<T>(word.integer);
}

template <class... Arguments>
void call_with(void (*function)(Arguments...), const Word* words) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    function(argument<Arguments>(words[I])...);
  }(std::index_sequence_for<Arguments...>{});
}

}  // namespace octavo

// Let `function`, an export, be part of programs.
#define OCTAVO_IN_PROGRAMS(function) \
  OCTAVO_EXPORT void function##_of_words(const octavo::Word* words) { octavo::call_with(function, words); }
