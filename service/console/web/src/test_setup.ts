// What a browser has and the test's document lacks.
import { cleanup } from '@testing-library/react'
import { afterEach, vi } from 'vitest'

class Nothing {
  observe() {}
  unobserve() {}
  disconnect() {}
}
vi.stubGlobal('ResizeObserver', Nothing)
window.scrollTo = () => undefined
Element.prototype.scrollTo = () => undefined
HTMLCanvasElement.prototype.getContext = () => null
HTMLDialogElement.prototype.showModal = function () {
  this.open = true
}
HTMLDialogElement.prototype.close = function () {
  this.open = false
}
// Charts are drawn on a canvas, which there is none of; what they are given is tested by itself.
vi.mock('uplot', () => ({ default: class { setData() {} setSize() {} destroy() {} } }))

afterEach(cleanup)
