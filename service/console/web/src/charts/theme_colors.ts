// The colours of the style sheet, for what is drawn on a canvas. Asked for anew whenever the theme changes.
import { useSyncExternalStore } from 'react'

let version = 0
const subscribe = (call: () => void) => {
  const changed = () => (version++, call())
  addEventListener('liver-theme', changed)
  return () => removeEventListener('liver-theme', changed)
}
export const useThemeVersion = (): number => useSyncExternalStore(subscribe, () => version)
export const color = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || '#888'
